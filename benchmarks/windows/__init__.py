"""Windows of local steps: what each form of them costs in loss, and peers whose windows take time."""
