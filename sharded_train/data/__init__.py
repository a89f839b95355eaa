"""Text to rows of tokens: where they come from, how they are packed, and which rows a step sees."""
