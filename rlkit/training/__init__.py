"""What runs in the trainer job: TRL's trainer built from a recipe, its prompts and rewards, and the toy task."""
