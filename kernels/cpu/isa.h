/* Everything that is compiled once per instruction set. The includer defines ISA_SUFFIX and maybe USE_AVX2. */
#define FN_JOIN(name, suffix) name##_##suffix
#define FN_EXPAND(name, suffix) FN_JOIN(name, suffix)
#define FN(name) FN_EXPAND(name, ISA_SUFFIX)

#include "vec.h"

#include "matmul.h"

#include "rows.h"

#include "attention.h"

#define ISA_NAME_JOIN(suffix) #suffix
#define ISA_NAME(suffix) ISA_NAME_JOIN(suffix)
static const struct isa FN(isa) = {
    .name = ISA_NAME(ISA_SUFFIX),
    .rmsnorm = FN(rmsnorm),
    .matmul = FN(matmul),
    .qkv = FN(qkv),
    .attention = FN(attention),
    .swiglu = FN(swiglu),
    .embed = FN(embed),
    .exp = FN(exp_op),
};

#undef ISA_NAME
#undef ISA_NAME_JOIN
#undef INLINE
#undef v8
#undef i8
#undef FN
#undef FN_EXPAND
#undef FN_JOIN
#undef ISA_SUFFIX
