COVERS = ("runtime.pipe",)
