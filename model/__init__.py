"""What a Llama model is: its configuration, its files, its text, and how it runs over the arena."""
