"""Mixed precision in fp16: the loss scaler and the optimizers that use it."""
