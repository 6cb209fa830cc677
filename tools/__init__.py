"""What turns a pinned SGLang release, the patch series and the overlay into one wheel."""
