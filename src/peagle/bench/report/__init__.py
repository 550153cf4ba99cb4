"""A report for a person who decides: a page, Markdown, a table of all figures, and plots."""
