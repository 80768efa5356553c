"""Windows of local steps in one process: what each form of them costs in loss."""
