"""Readers of research datasets in their own files: NLVR, VCR, SNLI-VE, Flickr8k, DAQUAR, Visual Genome and others."""
