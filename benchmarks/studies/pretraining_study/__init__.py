"""What pretraining is worth, asked so that an answer can be had: arms, contrasts written down before, paired seeds."""
