"""Self-contained HTML pages: no script, font or image from elsewhere, readable in light and dark and on a phone."""
