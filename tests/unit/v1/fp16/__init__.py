COVERS = ("runtime.fp16",)
