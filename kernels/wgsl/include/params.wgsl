// The parameters of a dispatch, `Params` of the file that includes this: immediates, or a row of a uniform buffer.
#if IMMEDIATES
var<immediate> params: Params;
#else
@group(1) @binding(0) var<uniform> params: Params;
#endif
