COVERS = ("moe",)
