"""fastamp in the frameworks people use; each module needs the extra of its name."""
