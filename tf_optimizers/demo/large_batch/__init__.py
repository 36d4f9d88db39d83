"""How far each optimizer gets in a few large steps."""
