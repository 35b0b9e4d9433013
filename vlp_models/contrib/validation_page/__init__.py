"""reports/validation.html: the verdict on the data, every rule and examples of bad rows."""
