"""The generator `boxes`: a synthetic NLVR, with sentences about scenes of three boxes."""
