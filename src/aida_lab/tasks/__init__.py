"""The tasks. Each combines model, data, loss and metrics on a device, with the interface of the training loop."""
