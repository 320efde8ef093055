// target.h: an instruction set for the functions between BEGIN_TARGET and END_TARGET; GCC keeps it to the end of the file.
#define PRAGMA(WORDS) _Pragma(#WORDS)
#if defined(__clang__)
#define BEGIN_TARGET(NAMES) PRAGMA(clang attribute push(__attribute__((target(NAMES))), apply_to = function))
#define END_TARGET PRAGMA(clang attribute pop)
#else
#define BEGIN_TARGET(NAMES) PRAGMA(GCC target(NAMES))
#define END_TARGET
#endif
