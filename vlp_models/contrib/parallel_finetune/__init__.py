"""`trainer.parallel_finetune`: `vlp run` trains several fine-tunings at the same time on a CPU."""
