"""What `linkcpp bench` measures, and its reports."""
