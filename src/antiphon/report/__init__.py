"""Tables and pages made from what runs wrote."""
