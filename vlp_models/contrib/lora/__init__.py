"""LoRA: `finetune.RUN.lora` trains adapters instead of the weights."""
