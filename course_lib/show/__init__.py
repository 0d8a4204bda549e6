"""What notebooks print and draw with: tables, source listings, figures."""
