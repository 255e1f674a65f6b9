COVERS = ("monitor.watch",)
