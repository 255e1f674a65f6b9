COVERS = ("ops.adagrad", "ops.lamb", "ops.lion", "ops.muon")
