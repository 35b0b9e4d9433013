"""`finetune.NAME.parts`: train a run in parts, each on its share of the images, and average the weights.

A withdrawn image is in one part, so forgetting it trains that part again and no other (docs/guides/forgetting.md).
"""
