"""Tasks that judge a text about an image: NLVR, NLVR2, visual entailment, VCR; and their files about the scenes."""
