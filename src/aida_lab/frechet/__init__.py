"""Fréchet distances between sets of images: by which network's features, from what moments, kept where.

FID is the distance on the features of one network with one file of weights. On another network's features it is
another number, which compares only with itself and is never called FID here.
"""
