"""A progress bar of the demo that only counts."""


class Progress:
    """Records the texts and the number of updates."""

    def __init__(self):
        self.shown, self.count, self.total = [], 0, None

    def reset(self, total):
        self.total = total

    def update(self):
        self.count += 1

    def set_description_str(self, text):
        self.shown.append(text)
