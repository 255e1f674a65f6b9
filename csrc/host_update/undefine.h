// Forgets what `vec.h` defined for one instruction set. No include guard: it is included once per instruction set.
#undef DS_WIDTH
#undef DS_INLINE
#undef DS_WIDEN
#undef DS_NARROW
