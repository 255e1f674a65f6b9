COVERS = ("runtime.pipe.messages",)
