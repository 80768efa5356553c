"""What all parts of a peer at one stage share: their context, what they tell each other, what runs beside them."""
