"""What programs of others have written, beside what made them write it."""
