"""What a step of :class:`aida.Aida` is made of besides its arithmetic. Private."""
