COVERS = ("runtime.sequence_parallel", "sequence")
