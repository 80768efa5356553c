"""LoRA: a frozen base, its file, and the narrow matrices beside its products that are trained."""
