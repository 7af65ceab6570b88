"""The tasks: each brings model, data, loss and measure together on a device, in the form the loop trains."""
