// Names that CUPTI's headers take from cuda.h. No compared struct holds one of them by value.
#pragma once
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUaccessPolicyWindow_st CUaccessPolicyWindow;
typedef union CUstreamAttrValue_un CUstreamAttrValue;
typedef struct { char bytes[16]; } CUuuid;
typedef int CUdevice;
typedef int CUdevice_attribute;
typedef int CUgraphNodeType;
typedef int CUstreamAttrID;
