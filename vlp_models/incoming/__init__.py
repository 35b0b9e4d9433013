"""New data at the door: what a drop is, the hashes of its pictures, and what the dataset knows already."""
