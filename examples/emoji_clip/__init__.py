"""CLIP with MoE towers on emoji and their names: data.py, model.py, training.py; ../train_clip_moe.py runs it."""
