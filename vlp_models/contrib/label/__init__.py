"""`vlp label`: a page on which people caption photos, from a draft that they accept or correct."""
