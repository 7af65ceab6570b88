"""The networks of the paper's experiments, independent of optimizers and data.

Initial values are torch's defaults unless a file says otherwise. Aida treats every parameter tensor as one layer, so
tensors that are separate in the public code (the q, k and v projections of an attention, the input and recurrent
weights of an LSTM) are separate here too. Fusing them would change the optimizer.
"""
