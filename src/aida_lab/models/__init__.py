"""The networks of the paper's experiments: plain modules that know neither optimizers nor data.

Initial values are torch's own except where a file says otherwise. Aida treats every parameter tensor as
one layer, so tensors that the public code keeps apart (the q, k and v maps of an attention, the input and
recurrent weights of an LSTM) are kept apart here too: fusing them would be another optimizer.
"""
