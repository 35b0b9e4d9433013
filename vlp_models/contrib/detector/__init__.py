"""What boxes teach: a region detector (Faster R-CNN), and the warm-up of vision encoders."""
