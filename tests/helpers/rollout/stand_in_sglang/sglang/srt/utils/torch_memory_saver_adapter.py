class TorchMemorySaverAdapter:
    @staticmethod
    def create(enable: bool) -> "TorchMemorySaverAdapter":
        return TorchMemorySaverAdapter()
