// The parameters of a dispatch, `Params` of the file that includes this: immediates, or a row of a uniform buffer.
//
// Of loads, in all files: a compiler awaits those of a branch where it joins, so loads of a loop that stand under a condition
// are awaited one by one. What is past an end is therefore loaded from before it, and not used.
#if IMMEDIATES
var<immediate> params: Params;
#else
@group(1) @binding(0) var<uniform> params: Params;
#endif
