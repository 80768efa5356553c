"""What is signed about versions: anchors, statements, and the past that they rest on."""
