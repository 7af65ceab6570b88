"""Fréchet distances between sets of images: feature networks, their weights, and the moments of the features.

FID is the distance for the features of one network with one file of weights. For another network the distance is
another metric, which is comparable only with itself and is never called FID here.
"""
