COVERS = ("runtime.bf16_optimizer",)
