COVERS = ("runtime.gradients", "runtime.optimizers", "runtime.sharding")
