"""`vlp bisect`: find, by retraining, which change between two versions or commits lowered a score."""
