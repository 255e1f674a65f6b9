COVERS = ("utils.groups",)
